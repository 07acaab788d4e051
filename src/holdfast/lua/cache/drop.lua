-- Delete a value, and the claim to compute it: a computation that runs now began before the change.
--
-- KEYS 1 the entry   2 the claim   3 the waiters   4 the failure
-- (no ARGV)
--
-- Returns 1 there was a value, 0 there was none.
--
-- One step, because a computation that stores its value in between would bring the old value back.

-- include cache.lua

read_time()
local found = redis.call('DEL', KEYS[1])
redis.call('DEL', KEYS[2], KEYS[4])
notify_all()
return found
