-- Admit a request of a caller, or say which limit stands in its way. All or nothing.
--
-- A minute's limits are buckets that hold a minute's worth and fill up again steadily. Tokens are
-- reserved (prompt + the most the answer may have); release.lua gives back what was not used. A lease
-- names the server that holds it, so that those of a dead server do not count.
--
-- KEYS, four for each subject (the key; its user):
--      1 limit:requests:<subject>  hash 'level' 'at' (ms), expires when full again
--      2 limit:tokens:<subject>    the same
--      3 limit:leases:<subject>    hash '<server>|<request>' -> reserved tokens; a day after the last
--      4 limit:day:<subject>       hash 'day' (number since 1970) 'used'; expires after two days
-- ARGV 1 key prefix  2 lease  3 tokens to reserve, then for each subject:
--      requests/min, tokens/min, concurrent, tokens/day (0: no limit)
-- Reply 1 or 0 (admitted), index of the subject and name of the limit in the way ('' for none),
--      ms until it may work (-1: never), then for each subject: requests left, ms until full,
--      tokens left, ms until full
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local day = math.floor(clock[1] / 86400)
local prefix, lease, need = ARGV[1], ARGV[2], tonumber(ARGV[3])
local count = #KEYS / 4

local function level_of(key, limit)
  local state = redis.call('HMGET', key, 'level', 'at')
  if not state[1] then return limit end
  return math.min(limit, tonumber(state[1]) + math.max(0, now - tonumber(state[2])) * limit / 60000)
end

local function drop_dead(leases)
  for _, name in ipairs(redis.call('HKEYS', leases)) do
    local server = string.match(name, '^(.-)|')
    if server and redis.call('EXISTS', prefix .. 'beat:server:' .. server) == 0 then
      redis.call('HDEL', leases, name)
    end
  end
end

local function reserved(leases)
  local sum = 0
  for _, amount in ipairs(redis.call('HVALS', leases)) do sum = sum + tonumber(amount) end
  return sum
end

local worst, subject, limit_name = 0, 0, ''
local function refuse(index, name, wait)
  -- the limit that holds longest is the one worth naming; one that never gives way before all others
  if worst >= 0 and (wait < 0 or wait > worst or limit_name == '') then
    worst, subject, limit_name = wait, index, name
  end
end

local levels = {}
for i = 1, count do
  local k, a = (i - 1) * 4, 3 + (i - 1) * 4
  local rpm, tpm, conc, daily =
    tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), tonumber(ARGV[a + 3]), tonumber(ARGV[a + 4])
  local r, t = level_of(KEYS[k + 1], rpm), level_of(KEYS[k + 2], tpm)
  levels[i] = {r, t, rpm, tpm}
  if rpm > 0 and r < 1 then refuse(i, 'requests', math.ceil((1 - r) * 60000 / rpm)) end
  if tpm > 0 and t < need then
    refuse(i, 'tokens', need > tpm and -1 or math.ceil((need - t) * 60000 / tpm))
  end
  if conc > 0 and redis.call('HLEN', KEYS[k + 3]) >= conc then
    drop_dead(KEYS[k + 3])
    if redis.call('HLEN', KEYS[k + 3]) >= conc then refuse(i, 'concurrent', 1000) end
  end
  if daily > 0 then
    local state = redis.call('HMGET', KEYS[k + 4], 'day', 'used')
    local used = state[1] and tonumber(state[1]) == day and tonumber(state[2]) or 0
    if used + reserved(KEYS[k + 3]) + need > daily then
      drop_dead(KEYS[k + 3])
      if used + reserved(KEYS[k + 3]) + need > daily then
        refuse(i, 'day_tokens', need > daily and -1 or (day + 1) * 86400000 - now)
      end
    end
  end
end

local ok = limit_name == ''
local reply = {ok and 1 or 0, subject, limit_name, worst}
for i = 1, count do
  local k = (i - 1) * 4
  local r, t, rpm, tpm = levels[i][1], levels[i][2], levels[i][3], levels[i][4]
  if ok then
    if rpm > 0 then
      r = r - 1
      redis.call('HSET', KEYS[k + 1], 'level', tostring(r), 'at', now)
      redis.call('PEXPIRE', KEYS[k + 1], 61000)
    end
    if tpm > 0 then
      t = t - need
      redis.call('HSET', KEYS[k + 2], 'level', tostring(t), 'at', now)
      redis.call('PEXPIRE', KEYS[k + 2], 61000)
    end
    redis.call('HSET', KEYS[k + 3], lease, need)
    redis.call('PEXPIRE', KEYS[k + 3], 86400000)
  end
  reply[#reply + 1] = math.floor(math.max(0, r))
  reply[#reply + 1] = rpm > 0 and math.ceil((rpm - r) * 60000 / rpm) or 0
  reply[#reply + 1] = math.floor(math.max(0, t))
  reply[#reply + 1] = tpm > 0 and math.ceil((tpm - t) * 60000 / tpm) or 0
end
return reply
