-- Compare what a server or worker believes it holds with the records (the bounded poll behind the hints).
--
-- KEYS 2i-1 req:{id} hash, read   2i log:{id} list, read
-- ARGV 1 field that must equal 2 value
-- Reply for each request the length of its log, or -1 where the record is gone or another's
local out = {}
for i = 1, #KEYS / 2 do
  if redis.call('HGET', KEYS[2 * i - 1], ARGV[1]) == ARGV[2] then
    out[i] = redis.call('LLEN', KEYS[2 * i])
  else
    out[i] = -1
  end
end
return out
