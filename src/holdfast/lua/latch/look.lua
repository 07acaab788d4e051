-- Read a latch; unless it is open, register for a notification.
--
-- KEYS 1 the latch   2 its waiters   3 the lock of this name   4 its queue   5 its waiters
-- ARGV 1 token   2 the expected initial count of the latch
--      3 notification channel ('-': wait without one, '': only look, write nothing)
--      4 how long the latch lasts, in ms
--
-- Returns {left, total}   0 left: it is open
--         {-1, total}     its initial count is another one: total
--         {-2, kind}      the name is in use as another kind of lock
--
-- One step, because a latch that opens between the read and the registration would not notify this waiter.

-- include latch.lua

local PRESENCE_US = 1000000 -- as in include/queue.lua
local MAX_REMOVED = 16 -- how many absent waiters one step removes; the next step continues

local left, total, exists = read_latch(ARGV[2])
if not left then
  return total
end
if left == '0' or ARGV[3] == '' then
  return {tonumber(left), tonumber(total)}
end

-- A waiter extends the life of the latch. A full server refuses that and the registration: the waiter looks again soon.
if not exists or redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then
  write_latch(left, total, ARGV[4])
end
if ARGV[3] ~= '-' then
  local time = redis.call('TIME')
  local now = time[1] .. string.sub('00000' .. time[2], -6)
  local waiter = ARGV[1] .. ' ' .. ARGV[3]
  redis.pcall('ZADD', KEYS[2], now, waiter)
  redis.call('PEXPIRE', KEYS[2], 5000)
  local oldest = redis.call('ZRANGE', KEYS[2], 0, MAX_REMOVED - 1, 'WITHSCORES')
  local absent = {}
  for index = 1, #oldest, 2 do
    if math.abs(now - oldest[index + 1]) <= PRESENCE_US then
      break
    end
    absent[#absent + 1] = oldest[index]
  end
  if absent[1] then
    redis.call('ZREM', KEYS[2], unpack(absent))
  end
end
return {tonumber(left), tonumber(total)}
