-- End a request: the one step to a terminal state. Any process, any number of times; one caller wins.
--
-- In the same script go the record, its token log and every index entry; the one abort is sent to the
-- worker that still generates for it; the server that streams it is told unless it is the caller.
--
-- KEYS 1 req:{id}   hash, removed
--      2 log:{id}   list, removed, or kept for the retention time where the request was resumable
--      3 end:{id}   string, summary, written where the log is kept (same TTL)
--      4 live  5 deadlines  6 detached   zsets, entry removed
--      7 history    list, summary pushed, trimmed
--      8 outcomes   hash, counter raised
--      9 usage      hash, what the request's owner has used today, until a server has put it into a database
--      and, named by the record: queue:<model>, fair:<model>, running:<model>, of:server:<id>,
--      of:worker:<id>
-- ARGV 1 id  2 state  3 reason  4 key prefix  5 retention, ms  6 history size  7 calling server or ''
--      8 guard field or ''  9 guard value  10 who counts this ending ('' where nobody does)
-- Reply nil where there is nothing (left) to settle or the guard does not hold; else the summary.
local names = {'state', 'model', 'server', 'worker', 'attempt', 'finish', 'resumable', 'endpoint', 'transport',
  'owner', 'prompt_tokens', 'tokens', 'created', 'claimed', 'first', 'last', 'deadline', 'claims', 'params'}
local values = redis.call('HMGET', KEYS[1], unpack(names))
if not values[1] then
  -- nothing is left of it; an index entry without a record would be a leftover of a crash
  redis.call('ZREM', KEYS[4], ARGV[1])
  redis.call('ZREM', KEYS[5], ARGV[1])
  redis.call('ZREM', KEYS[6], ARGV[1])
  return false
end
if ARGV[8] ~= '' and redis.call('HGET', KEYS[1], ARGV[8]) ~= ARGV[9] then return false end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local rec = {}
for i, name in ipairs(names) do rec[name] = values[i] or '' end
local prefix, id = ARGV[4], ARGV[1]
local function number(name) return tonumber(rec[name]) or 0 end

redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[4], id)
redis.call('ZREM', KEYS[5], id)
redis.call('ZREM', KEYS[6], id)
if redis.call('ZREM', prefix .. 'queue:' .. rec.model, id) == 1
    and redis.call('EXISTS', prefix .. 'queue:' .. rec.model) == 0 then
  redis.call('DEL', prefix .. 'fair:' .. rec.model)
end
redis.call('SREM', prefix .. 'running:' .. rec.model, id)
if rec.server ~= '' then redis.call('SREM', prefix .. 'of:server:' .. rec.server, id) end
if rec.worker ~= '' then redis.call('SREM', prefix .. 'of:worker:' .. rec.worker, id) end

if rec.state == 'running' and rec.finish == '' then
  redis.call('PUBLISH', prefix .. 'to:worker:' .. rec.worker, cmsgpack.pack({'a', id, number('attempt')}))
end
if rec.server ~= '' and rec.server ~= ARGV[7] then
  redis.call('PUBLISH', prefix .. 'to:server:' .. rec.server, cmsgpack.pack({'e', id, {ARGV[2], ARGV[3]}}))
end

local ending = cmsgpack.pack({
  id = id, model = rec.model, state = ARGV[2], reason = ARGV[3], endpoint = rec.endpoint,
  transport = rec.transport, owner = rec.owner, server = rec.server, worker = rec.worker,
  attempts = number('attempt'), prompt_tokens = number('prompt_tokens'), generated_tokens = number('tokens'),
  created_ms = number('created'), claimed_ms = number('claimed'), first_token_ms = number('first'),
  last_token_ms = number('last'), deadline_ms = number('deadline'), claims = rec.claims, params = rec.params,
  ended_ms = now, by = ARGV[10]})
redis.call('LPUSH', KEYS[7], ending)
redis.call('LTRIM', KEYS[7], 0, tonumber(ARGV[6]) - 1)
redis.call('HINCRBY', KEYS[8], ARGV[2] .. ':' .. ARGV[3], 1)
local account = math.floor(now / 86400000) .. '|' .. rec.owner .. '|' .. rec.model
redis.call('HINCRBY', KEYS[9], 'r|' .. account, 1)
redis.call('HINCRBY', KEYS[9], 'p|' .. account, number('prompt_tokens'))
redis.call('HINCRBY', KEYS[9], 'g|' .. account, number('tokens'))
if rec.resumable == '1' and tonumber(ARGV[5]) > 0 then
  if rec.finish == '' then
    -- readers that come later find the ending as the log's last entry
    local len = redis.call('LLEN', KEYS[2])
    redis.call('RPUSH', KEYS[2], cmsgpack.pack({len + 1, {}, '', ARGV[2] .. ':' .. ARGV[3]}))
  end
  redis.call('PEXPIRE', KEYS[2], ARGV[5])
  redis.call('SET', KEYS[3], ending, 'PX', ARGV[5])
else
  redis.call('DEL', KEYS[2])
end
return ending
