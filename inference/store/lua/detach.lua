-- A server lets go of a resumable request whose client is gone: generation goes on for a grace time.
--
-- KEYS 1 req:{id}   hash, server emptied
--      2 detached   zset, entry added (score: end of grace, ms)
--      and of:server:<id> (entry removed)
-- ARGV 1 id  2 server that must hold it  3 key prefix  4 grace, ms  5 reader that must hold it ('' for the first),
--      or '*' for any
-- Reply 'detached', 'finished' (its last frame is logged: settle it as that), 'fixed' (not resumable) or 'gone'
local rec = redis.call('HMGET', KEYS[1], 'server', 'finish', 'resumable', 'worker', 'reader')
if rec[1] ~= ARGV[2] then
  redis.call('SREM', ARGV[3] .. 'of:server:' .. ARGV[2], ARGV[1])
  return {'gone', ''}
end
-- this server holds it for a later reader
if ARGV[5] ~= '*' and (rec[5] or '') ~= ARGV[5] then return {'gone', ''} end
if rec[3] ~= '1' then return {'fixed', ''} end
if rec[2] ~= '' then return {'finished', rec[2]} end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
redis.call('HSET', KEYS[1], 'server', '')
redis.call('SREM', ARGV[3] .. 'of:server:' .. ARGV[2], ARGV[1])
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[4]), ARGV[1])
if rec[4] and rec[4] ~= '' then
  redis.call('PUBLISH', ARGV[3] .. 'to:worker:' .. rec[4], cmsgpack.pack({'m', ARGV[1], ''}))
end
return {'detached', ''}
