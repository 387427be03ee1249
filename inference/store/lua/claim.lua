-- A worker takes requests that are still queued. The step queued -> running, as compare-and-set.
--
-- KEYS 1 queue:<model>    zset, entries removed
--      2 running:<model>  set, entries added
--      3 fair:<model>     hash, virtual time moved on; dropped with the last queue entry
--      4 of:worker:<id>   set, entries added
--      and, named by the queue: req:{id} hash (state, worker, attempt), log:{id} list (read), deadlines
--      zset (score: from now on the deadline of the whole request)
-- ARGV 1 worker  2 how many  3 key prefix
-- Reply a list of {id, attempt, job, server, {log entries}}
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local taken = {}
while #taken < tonumber(ARGV[2]) do
  local top = redis.call('ZPOPMIN', KEYS[1])
  if not top[1] then break end
  local id = top[1]
  local req = ARGV[3] .. 'req:{' .. id .. '}'
  local rec = redis.call('HMGET', req, 'state', 'server', 'job', 'class', 'tag', 'deadline', 'claims')
  -- an entry whose record is gone belongs to a request that has ended: it is simply dropped
  if rec[1] == 'queued' then
    local attempt = redis.call('HINCRBY', req, 'attempt', 1)
    redis.call('HSET', req, 'state', 'running', 'worker', ARGV[1], 'claimed_at', now)
    redis.call('HSETNX', req, 'claimed', now)
    -- who has had it and since when, for operators; of very many the latest
    local claims = (rec[7] or '') .. now .. ' ' .. ARGV[1] .. '\n'
    while #claims > 1500 do claims = string.gsub(claims, '^[^\n]*\n', '') end
    redis.call('HSET', req, 'claims', claims)
    redis.call('ZADD', ARGV[3] .. 'deadlines', rec[6], id)
    redis.call('SADD', KEYS[2], id)
    redis.call('SADD', KEYS[4], id)
    redis.call('HSET', KEYS[3], 'v:' .. rec[4], rec[5])
    if rec[2] ~= '' then
      redis.call('PUBLISH', ARGV[3] .. 'to:server:' .. rec[2], cmsgpack.pack({'c', id, ARGV[1], attempt}))
    end
    local log = {}
    if attempt > 1 then log = redis.call('LRANGE', ARGV[3] .. 'log:{' .. id .. '}', 0, -1) end
    taken[#taken + 1] = {id, attempt, rec[3], rec[2], log}
  end
end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('DEL', KEYS[3]) end
return taken
