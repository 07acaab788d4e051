-- Read the leader's token and fence. Nothing is written.
--
-- KEYS 1 the lock of the election   2 the last fences given out for this name, see fence.lua
--      3 the waiters, with 'kind' if the name is in use as another kind of lock
-- (no ARGV)
--
-- Returns {token, fence, kind}, each nil if there is none. A fence that was given to another token does not count: the
--         key may be reserved for a waiter, or belong to a client that takes no fence.
--
-- One step, because between two reads the leader can change, and the token would come with the fence of another leader.

local token, fences = redis.call('GET', KEYS[1]), redis.pcall('GET', KEYS[2])
local fence, tail = string.match(type(fences) == 'string' and fences or '', '^(%d+) %d%d? (%S+)$')
local number = token and string.sub(token, -8) == tail and tonumber(fence) or 0
if number < 1 or number > 9007199254740991 then
  fence = false -- not one of ours: the next acquire step replaces or refuses it
end
return {token, fence, redis.call('HGET', KEYS[3], 'kind')}
