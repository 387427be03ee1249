-- A server takes over the stream of a resumable request; the reader before it is told.
--
-- KEYS 1 req:{id}       hash, server, reader and turn set
--      2 detached       zset, entry removed
--      3 of:server:<id> set, entry added
-- ARGV 1 id  2 server  3 reader (unique per stream)  4 key prefix  5 owner that must match, or ''
-- Reply {'gone'}, {'fixed'} (not resumable), {'foreign'} (another owner's) or
--      {'ok', state, model, endpoint, owner, attempt, prompt_tokens, job, turn, created}
--      - readers count from 1; created in ms
local rec = redis.call('HMGET', KEYS[1], 'state', 'server', 'worker', 'resumable', 'owner', 'model', 'endpoint',
  'attempt', 'prompt_tokens', 'job', 'created')
if not rec[1] then return {'gone'} end
if ARGV[5] ~= '' and rec[5] ~= ARGV[5] then return {'foreign'} end
if rec[4] ~= '1' then return {'fixed'} end
redis.call('ZREM', KEYS[2], ARGV[1])
local turn = redis.call('HINCRBY', KEYS[1], 'turn', 1)
if rec[2] ~= '' then
  redis.call('PUBLISH', ARGV[4] .. 'to:server:' .. rec[2], cmsgpack.pack({'x', ARGV[1], ARGV[3], turn}))
  redis.call('SREM', ARGV[4] .. 'of:server:' .. rec[2], ARGV[1])
end
redis.call('SADD', KEYS[3], ARGV[1])
redis.call('HSET', KEYS[1], 'server', ARGV[2], 'reader', ARGV[3])
if rec[3] ~= '' then
  redis.call('PUBLISH', ARGV[4] .. 'to:worker:' .. rec[3], cmsgpack.pack({'m', ARGV[1], ARGV[2]}))
end
return {'ok', rec[1], rec[6], rec[7], rec[5], rec[8], rec[9], rec[10], turn, rec[11]}
