-- Take a running request away from a worker and put it at the head of its class: it goes on elsewhere.
--
-- KEYS 1 req:{id}  hash, state running -> queued
--      and, named by the record: queue:<model> (entry added), running:<model>, of:worker:<id> (removed)
-- ARGV 1 id  2 worker that must hold it  3 key prefix  4 most that may count against it
--      5 how much this counts: 3 where the worker died, 1 where it only fell silent (it may live), 0 where it
--      hands back what it holds
-- Reply 'requeued', 'exhausted' (it has lost too many workers; settle it), 'finished' (its last frame is
--      logged; nothing to do) or 'gone'
local rec = redis.call('HMGET', KEYS[1], 'state', 'worker', 'finish', 'model', 'class', 'tag', 'lost', 'claims')
if rec[1] ~= 'running' or rec[2] ~= ARGV[2] then
  redis.call('SREM', ARGV[3] .. 'of:worker:' .. ARGV[2], ARGV[1])
  return 'gone'
end
if rec[3] ~= '' then
  redis.call('SREM', ARGV[3] .. 'of:worker:' .. ARGV[2], ARGV[1])
  return 'finished'
end
if ARGV[5] ~= '0' and redis.call('HINCRBY', KEYS[1], 'lost', ARGV[5]) >= tonumber(ARGV[4]) then
  return 'exhausted'
end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', KEYS[1], 'state', 'queued', 'worker', '', 'queued_at', now, 'claims', (rec[8] or '') .. now .. ' \n')
redis.call('SREM', ARGV[3] .. 'of:worker:' .. ARGV[2], ARGV[1])
redis.call('SREM', ARGV[3] .. 'running:' .. rec[4], ARGV[1])
-- half a class before the rest: it has waited its turn already
redis.call('ZADD', ARGV[3] .. 'queue:' .. rec[4], rec[5] * 1099511627776 - 549755813888 + rec[6], ARGV[1])
redis.call('PUBLISH', ARGV[3] .. 'wake:' .. rec[4], '')
return 'requeued'
