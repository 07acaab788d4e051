-- See how far a latch is; and, unless it is open, wait to be told.
--
-- KEYS 1 the latch   2 its waiters   3 the lock of this name   4 its queue   5 its waiters
-- ARGV 1 token   2 the count that it should have begun with
--      3 the channel on which to be told ('-': none, but it waits; '': it only looks, and nothing is written)
--      4 how long the latch is remembered, in ms
--
-- Returns {left, total}   0 is open
--         {-1, total}     it began with another count
--         {-2, kind}      the name is in use as another kind of lock
--
-- One step, because a latch that opens between a look at it and the entry among its waiters would tell nobody.

-- include latch_state.lua

local PRESENCE_US = 1000000 -- as in a queue
local MAX_STRUCK = 16 -- absent waiters that one step takes out: the next one goes on

local left, total, there = read_latch(ARGV[2])
if not left then
  return total
end
if left == '0' or ARGV[3] == '' then
  return {tonumber(left), tonumber(total)}
end

-- Who waits keeps it in mind. On a full server that, and being told, is done without: it asks again soon.
if not there or redis.call('PTTL', KEYS[1]) < tonumber(ARGV[4]) then
  write_latch(left, total, ARGV[4])
end
if ARGV[3] ~= '-' then
  local time = redis.call('TIME')
  local now = time[1] .. string.sub('00000' .. time[2], -6)
  local waiter = ARGV[1] .. ' ' .. ARGV[3]
  redis.pcall('ZADD', KEYS[2], now, waiter)
  redis.call('PEXPIRE', KEYS[2], 5000)
  local oldest = redis.call('ZRANGE', KEYS[2], 0, MAX_STRUCK - 1, 'WITHSCORES')
  local absent = {}
  for place = 1, #oldest, 2 do
    if math.abs(now - oldest[place + 1]) <= PRESENCE_US then
      break
    end
    absent[#absent + 1] = oldest[place]
  end
  if absent[1] then
    redis.call('ZREM', KEYS[2], unpack(absent))
  end
end
return {tonumber(left), tonumber(total)}
