-- One engine step: append each request's frame to its token log and publish the step to the servers.
--
-- A frame is taken only from the worker and attempt that hold the claim, and only as the next of its
-- log: a worker that was cut off and comes back changes nothing, and a step that is sent again after a
-- lost reply is not appended twice. Where the log is shorter than the worker believes (a failover lost its
-- end), the frame is refused as 'gap'. A record that is gone is never brought back.
--
-- KEYS 2i-1 req:{id}  hash, read; tokens, first, last, finish set
--      2i   log:{id}  list, entry added; ends with its request
-- ARGV 1 worker  2 key prefix  3 number of frames n, then for each frame:
--      id, attempt, seq, frame, tokens so far, finish or '', server it is meant for, 1 once text has been shown
--      and after the frames pairs of server, payload
-- Reply a flat list of exceptions: index (from 0), 'stale' | 'gap' | 'moved' | 'detached', new server.
--      A payload is published only where all its frames were taken.
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local n = tonumber(ARGV[3])
local odd = {}
local hold = {}
-- A step that waited brings several frames of one request: its record is read, and counted in, once.
local records = {}
local counts = {}
local shown = {}
for i = 1, n do
  local a = 4 + (i - 1) * 8
  local req, log = KEYS[2 * i - 1], KEYS[2 * i]
  local rec = records[req]
  if not rec then
    rec = redis.call('HMGET', req, 'worker', 'attempt', 'server', 'first')
    records[req] = rec
  end
  if rec[1] ~= ARGV[1] or rec[2] ~= ARGV[a + 1] then
    odd[#odd + 1] = i - 1; odd[#odd + 1] = 'stale'; odd[#odd + 1] = ''
    hold[ARGV[a + 6]] = true
  else
    local seq = tonumber(ARGV[a + 2])
    local len = redis.call('RPUSH', log, ARGV[a + 3])
    if len ~= seq then redis.call('RPOP', log) end
    if len < seq then
      odd[#odd + 1] = i - 1; odd[#odd + 1] = 'gap'; odd[#odd + 1] = ''
      hold[ARGV[a + 6]] = true
    elseif len == seq then
      -- not a frame that only says how it ended: it has no token
      if ARGV[a + 4] ~= '0' then
        counts[req] = ARGV[a + 4]
        shown[req] = shown[req] or ARGV[a + 7] == '1'
      end
      if ARGV[a + 5] ~= '' then
        redis.call('HSET', req, 'finish', ARGV[a + 5])
        redis.call('SREM', ARGV[2] .. 'of:worker:' .. ARGV[1], ARGV[a])
        redis.call('SREM', ARGV[2] .. 'running:' .. redis.call('HGET', req, 'model'), ARGV[a])
      end
    end
    if rec[3] ~= ARGV[a + 6] then
      odd[#odd + 1] = i - 1; odd[#odd + 1] = 'moved'; odd[#odd + 1] = rec[3]
    end
    if rec[3] == '' and ARGV[a + 5] ~= '' then
      odd[#odd + 1] = i - 1; odd[#odd + 1] = 'detached'; odd[#odd + 1] = ''
    end
  end
end
for req, tokens in pairs(counts) do
  if records[req][4] or not shown[req] then
    redis.call('HSET', req, 'tokens', tokens, 'last', now)
  else
    redis.call('HSET', req, 'tokens', tokens, 'last', now, 'first', now)
  end
end
for i = 4 + n * 8, #ARGV, 2 do
  if not hold[ARGV[i]] then
    redis.call('PUBLISH', ARGV[2] .. 'to:server:' .. ARGV[i], ARGV[i + 1])
  end
end
return odd
