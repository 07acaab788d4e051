-- See who leads. Nothing is written.
--
-- KEYS 1 the lock of the election   2 the last fence given out for this name
-- (no ARGV)
--
-- Returns {token, fence}, each nil or false if there is none.
--
-- One step, because between the two a leader may go and another come, and would be shown with the fence of the wrong one.

return {redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2])}
