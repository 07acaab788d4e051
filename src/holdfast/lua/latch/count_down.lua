-- Count a latch down, once for this token. If that opens it, notify its waiters.
--
-- KEYS 1 the latch   2 its waiters   3 the lock of this name   4 its queue   5 its waiters
--      6 the tombstone of this token: what was left when it was counted
-- ARGV 1 token   2 the expected initial count of the latch   3 by how much   4 how long the latch lasts, in ms
--      5 how long the tombstone lasts, in ms
--
-- Returns {left, total}   0 left: it is open
--         {-1, total}     its initial count is another one: total
--         {-2, kind}      the name is in use as another kind of lock
--
-- One step, because two clients that read the same count would both write the same new count; because a request that is
-- sent twice must be counted once; and because a waiter that registers meanwhile must be notified here or see the latch
-- open.

-- include latch.lua

local counted = redis.call('GET', KEYS[6])
if counted then
  return {tonumber(counted), tonumber(ARGV[2])}
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
  local message = ' ask ' .. time[1] .. string.sub('00000' .. time[2], -6) .. ' 0'
  -- Only the 1000 latest, because the work of one step is bounded. Every other waiter looks again within half a second.
  local waiters = redis.call('ZRANGE', KEYS[2], -1000, -1)
  redis.call('DEL', KEYS[2])
  for _, waiter in ipairs(waiters) do
    local token, channel = string.match(waiter, '^(%S+) (.+)$')
    if channel then
      redis.pcall('PUBLISH', channel, token .. message)
    end
  end
end
return {tonumber(left), tonumber(total)}
