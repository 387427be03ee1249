-- Give back what a request did not use, and count what it did. Harmless when repeated.
--
-- KEYS as acquire.lua. ARGV 1 lease  2 tokens used, then for each subject: tokens/min (0: no limit)
-- Reply 1 where the lease was there, else 0.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local day = math.floor(clock[1] / 86400)
local lease, used = ARGV[1], tonumber(ARGV[2])
local found = 0
for i = 1, #KEYS / 4 do
  local k = (i - 1) * 4
  local amount = redis.call('HGET', KEYS[k + 3], lease)
  if amount then
    found = 1
    redis.call('HDEL', KEYS[k + 3], lease)
    local tpm = tonumber(ARGV[2 + i])
    local state = redis.call('HMGET', KEYS[k + 2], 'level', 'at')
    if tpm > 0 and state[1] then
      local level = tonumber(state[1]) + math.max(0, now - tonumber(state[2])) * tpm / 60000
      level = math.min(tpm, level + math.max(0, tonumber(amount) - used))
      redis.call('HSET', KEYS[k + 2], 'level', tostring(level), 'at', now)
      redis.call('PEXPIRE', KEYS[k + 2], 61000)
    end
    local today = redis.call('HMGET', KEYS[k + 4], 'day', 'used')
    local before = today[1] and tonumber(today[1]) == day and tonumber(today[2]) or 0
    redis.call('HSET', KEYS[k + 4], 'day', day, 'used', before + used)
    redis.call('PEXPIRE', KEYS[k + 4], 172800000)
  end
end
return found
