-- Append one sample to the series behind the charts, unless a fresh one is there already.
--
-- Every server calls this once per period; whoever comes first after the period is over appends, so that
-- there is one sample per period and no leader.
--
-- KEYS 1 series:load       list of samples, newest first; trimmed, TTL renewed
--      2 live (zset)  3 outcomes (hash)  4 history (list), all read
-- ARGV 1 period, ms  2 samples to keep  3 TTL, ms  4 tokens/s  5 requests running on workers
--      6 endings to look at, at most
-- Reply 1 where a sample was appended, else 0
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local period, since = tonumber(ARGV[1]), 0
local newest = redis.call('LINDEX', KEYS[1], 0)
if newest then
  since = cmsgpack.unpack(newest).at_ms
  -- a clock that was set back must not stop the series
  if math.abs(now - since) < period then return 0 end
end

-- time to the first token of those that have ended since the last sample
local waits = {}
for _, raw in ipairs(redis.call('LRANGE', KEYS[4], 0, tonumber(ARGV[6]) - 1)) do
  local ending = cmsgpack.unpack(raw)
  if ending.ended_ms <= since then break end
  if ending.first_token_ms > 0 then waits[#waits + 1] = ending.first_token_ms - ending.created_ms end
end
table.sort(waits)
local function quantile(q) return waits[math.max(1, math.ceil(q * #waits))] or -1 end

local flat, outcomes = redis.call('HGETALL', KEYS[3]), {}
for i = 1, #flat, 2 do outcomes[flat[i]] = tonumber(flat[i + 1]) end
local sample = {at_ms = now, inflight = redis.call('ZCARD', KEYS[2]), running = tonumber(ARGV[5]),
  rate = tonumber(ARGV[4]), ttft_p50 = quantile(0.5), ttft_p95 = quantile(0.95)}
-- an empty Lua table would be packed as an array
if next(outcomes) then sample.outcomes = outcomes end
redis.call('LPUSH', KEYS[1], cmsgpack.pack(sample))
redis.call('LTRIM', KEYS[1], 0, tonumber(ARGV[2]) - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
