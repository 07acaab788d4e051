-- Count a latch down, once for this token; and if that opens it, wake whoever waits.
--
-- KEYS 1 the latch   2 its waiters   3 the lock of this name   4 its queue   5 its waiters
--      6 the tombstone of this token: it was counted, and this much was left then
-- ARGV 1 token   2 the count that it should have begun with   3 by how much   4 how long it is remembered, in ms
--      5 how long the tombstone stands, in ms
--
-- Returns {left, total}   0 is open
--         {-1, total}     it began with another count
--         {-2, kind}      the name is in use as another kind of lock
--
-- One step, because two who read the same rest would both write it less one, and the latch would never open; because a
-- request that is sent again must find out whether it was counted; and because whoever registers as a waiter while it
-- opens must be seen here, or must see it open.

-- include latch_state.lua

local said = redis.call('GET', KEYS[6])
if said then
  return {tonumber(said), tonumber(ARGV[2])}
end
local left, total = read_latch(ARGV[2])
if not left then
  return total
end
if left == '0' then
  return {0, tonumber(total)}
end

left = string.format('%d', math.max(0, left - ARGV[3]))
local full = write_latch(left, total, ARGV[4])
if full then
  return full
end
redis.call('SET', KEYS[6], left, 'PX', ARGV[5])
if left == '0' then
  local time = redis.call('TIME')
  local words = ' ask ' .. time[1] .. string.sub('00000' .. time[2], -6) .. ' 0'
  -- The waiters that asked last, for the work of one step is bounded. Any other asks again within half a second.
  local waiters = redis.call('ZRANGE', KEYS[2], -1000, -1)
  redis.call('DEL', KEYS[2])
  for _, waiter in ipairs(waiters) do
    local token, channel = string.match(waiter, '^(%S+) (.+)$')
    if channel then
      redis.pcall('PUBLISH', channel, token .. words)
    end
  end
end
return {tonumber(left), tonumber(total)}
