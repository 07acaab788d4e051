-- Forget a value, and whatever is being computed: that was begun before, and may not know of what has changed.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
-- (no ARGV)
--
-- Returns 1 there was a value, 0 there was none.
--
-- One step, because a computation that could store between two of these would bring the old value back.

-- include cache_bells.lua

read_time()
local found = redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2], KEYS[4])
ring_all()
return found
