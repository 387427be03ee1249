-- Count the workers that a pool has replaced, into a total that outlives the pool.
--
-- Called again after a lost reply, it adds nothing twice: a pool says how many it has replaced in all, and
-- what of that was taken before is remembered beside the total. Entries of pools that are gone are dropped
-- here; a pool that was only silent says itself what it knows to have been taken.
--
-- KEYS 1 restarts  hash, field 'total' raised, field of the pool set
--      2 pools     set, read
-- ARGV 1 pool  2 workers that it has replaced  3 how many of them it knows to be in the total
-- Reply the total
local before = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or ARGV[3])
local count = tonumber(ARGV[2])
if count > before then redis.call('HINCRBY', KEYS[1], 'total', count - before) end
redis.call('HSET', KEYS[1], ARGV[1], math.max(count, before))
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  if name ~= 'total' and name ~= ARGV[1] and redis.call('SISMEMBER', KEYS[2], name) == 0 then
    redis.call('HDEL', KEYS[1], name)
  end
end
return tonumber(redis.call('HGET', KEYS[1], 'total') or 0)
