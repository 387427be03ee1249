-- Read live requests for operators: a page of the index by age, or given ids. Changes nothing.
--
-- One call gives all that a list shows, so that a list of thousands costs a handful of commands. The caller
-- keeps pages small (some hundred requests), since Redis serves nobody else meanwhile.
--
-- KEYS 1 live              zset, read
--      and, named by ARGV or the records: req:{id} (hash), queue:<model> (zset), beat:server:<id> and
--      beat:worker:<id> (strings), all read only
-- ARGV 1 key prefix  2 'newest' | 'oldest' | 'ids'  3 offset  4 count  5 number of fields  then the fields to
--      read, which begin with state, model, server, worker; then, for 'ids', the ids
-- Reply {requests in all, now in ms, {id, place in the queue or -1, 1 where its server or worker has no
--      heartbeat, since when its client is too slow (ms, 0: it is not), value or '' of each field}...}
local prefix, order, offset, count = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local fields, ids = {}, {}
for i = 1, tonumber(ARGV[5]) do fields[i] = ARGV[5 + i] end
if order == 'ids' then
  for i = 6 + #fields, #ARGV do ids[#ids + 1] = ARGV[i] end
else
  ids = redis.call(order == 'newest' and 'ZREVRANGE' or 'ZRANGE', KEYS[1], offset, offset + count - 1)
end

-- each heartbeat is read once per call
local servers, workers = {}, {}
local function server_of(id)
  if servers[id] == nil then
    local raw = redis.call('GET', prefix .. 'beat:server:' .. id)
    local ok, beat = pcall(cmsgpack.unpack, raw or '')
    servers[id] = raw and (ok and type(beat) == 'table' and beat.blocked or {})
  end
  return servers[id]
end
local function worker_alive(id)
  if workers[id] == nil then workers[id] = redis.call('EXISTS', prefix .. 'beat:worker:' .. id) == 1 end
  return workers[id]
end

local clock = redis.call('TIME')
local out = {redis.call('ZCARD', KEYS[1]), clock[1] * 1000 + math.floor(clock[2] / 1000)}
for _, id in ipairs(ids) do
  local values = redis.call('HMGET', prefix .. 'req:{' .. id .. '}', unpack(fields))
  local state, model, server, worker = values[1], values[2], values[3] or '', values[4] or ''
  if state then
    local orphaned, blocked, place = 0, 0, false
    if server ~= '' then
      local slow = server_of(server)
      if slow then blocked = tonumber(slow[id]) or 0 else orphaned = 1 end
    end
    if worker ~= '' and not worker_alive(worker) then orphaned = 1 end
    if state == 'queued' then place = redis.call('ZRANK', prefix .. 'queue:' .. model, id) end
    local row = {id, place or -1, orphaned, blocked}
    for i = 1, #fields do row[4 + i] = values[i] or '' end
    out[#out + 1] = row
  end
end
return out
