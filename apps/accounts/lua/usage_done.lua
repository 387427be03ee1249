-- The batch is in the database: drop it, unless another one is there by now.
--
-- KEYS 1 usage:batch
-- ARGV 1 the batch's id
-- Reply 1 where it was dropped.
if redis.call('HGET', KEYS[1], 'id') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
