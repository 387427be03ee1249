-- Set what has been used since the last batch apart, as the next batch; or give the batch that waits already.
--
-- KEYS 1 usage   2 usage:batch
-- ARGV 1 id for a new batch
-- Reply the batch's fields and values, its id under 'id'; empty where nothing has been used.
if redis.call('EXISTS', KEYS[2]) == 0 and redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('RENAME', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[2], 'id', ARGV[1])
end
return redis.call('HGETALL', KEYS[2])
