-- See who leads. Nothing is written.
--
-- KEYS 1 the lock of the election   2 the last fence given out for this name
--      3 the waiters, with '' -> of what kind the name is, if it is no mutex at the moment
-- (no ARGV)
--
-- Returns {token, fence, kind}, each nil or false if there is none. A kind: the name is in use as that one.
--
-- One step, because between the two a leader may go and another come, and would be shown with the fence of the wrong one.

local kind = string.match(redis.call('HGET', KEYS[3], '') or '', '^%a+$') or false
return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), kind}
