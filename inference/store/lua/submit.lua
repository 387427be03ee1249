-- Accept a request: store its record and put it into the queue, or say that the queue is full.
--
-- KEYS 1 req:{id}        hash, created; until settled
--      2 queue:<model>   zset, entry added (score: class * 2^40 + virtual time)
--      3 running:<model> set, counted
--      4 fair:<model>    hash, last virtual time per class and owner; dropped when the queue is empty
--      5 live            zset, entry added (score: created, ms)
--      6 deadlines       zset, entry added (score: deadline, ms; while it waits, the end of its patience if sooner)
--      7 of:server:<id>  set, entry added
-- ARGV 1 id  2 most queued + running  3 class (0..2)  4 owner  5 timeout, ms  6 server
--      7 wake channel  8 longest wait in the queue, ms  9... field, value of the record
-- Reply {'ok', now ms, position from 0} or {'full', queued, running}
--
-- Fairness is start-time fair queueing (Goyal, Vin, Cheng: "Start-time Fair Queuing", 1996) with
-- equal weights and unit cost: each owner's next request is tagged one later than its last, but
-- never earlier than the tag served last, so an owner's backlog delays only that owner.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
if redis.call('EXISTS', KEYS[1]) == 1 then
  -- the same submit again after a lost reply
  return {'ok', now, redis.call('ZRANK', KEYS[2], ARGV[1]) or 0}
end
local queued = redis.call('ZCARD', KEYS[2])
local running = redis.call('SCARD', KEYS[3])
if queued + running >= tonumber(ARGV[2]) then
  return {'full', queued, running}
end
local class = ARGV[3]
local served = tonumber(redis.call('HGET', KEYS[4], 'v:' .. class) or 0)
local last = tonumber(redis.call('HGET', KEYS[4], 'o:' .. class .. ':' .. ARGV[4]) or 0)
local tag = math.max(served, last) + 1
redis.call('HSET', KEYS[4], 'o:' .. class .. ':' .. ARGV[4], tag)
local deadline = now + tonumber(ARGV[5])
local fields = {'state', 'queued', 'server', ARGV[6], 'worker', '', 'attempt', 0, 'lost', 0,
  'created', now, 'queued_at', now, 'deadline', deadline, 'class', class, 'tag', tag, 'tokens', 0, 'finish', ''}
for i = 9, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', KEYS[1], unpack(fields))
redis.call('ZADD', KEYS[2], class * 1099511627776 + tag, ARGV[1])
redis.call('ZADD', KEYS[5], now, ARGV[1])
redis.call('ZADD', KEYS[6], math.min(deadline, now + tonumber(ARGV[8])), ARGV[1])
redis.call('SADD', KEYS[7], ARGV[1])
redis.call('PUBLISH', ARGV[7], '')
return {'ok', now, redis.call('ZRANK', KEYS[2], ARGV[1])}
