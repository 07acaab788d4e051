-- See who leads. Nothing is written.
--
-- KEYS 1 the lock of the election   2 the last fence given out for this name
--      3 the waiters, with '' -> of what kind the name is, if it is no mutex at the moment
-- (no ARGV)
--
-- Returns {token, fence, kind}, each nil or false if there is none. A kind: the name is in use as that one.
--
-- One step, because between the two a leader may go and another come, and would be shown with the fence of the wrong one.

local fence = redis.pcall('GET', KEYS[2])
if type(fence) ~= 'string' or not string.find(fence, '^%d+$') or tonumber(fence) > 9007199254740991 or tonumber(fence) < 1 then
  fence = false -- not one of ours: the next acquire replaces or refuses it
end
local kind = string.match(redis.call('HGET', KEYS[3], '') or '', '^%a+$') or false
return {redis.call('GET', KEYS[1]), fence, kind}
