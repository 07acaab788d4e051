-- Release a permit, and admit the next waiters that fit.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 freed, 0 it holds nothing, or its lease had ended.
--
-- One step, because a permit that is free in between goes to the client that happens to ask, not to the first waiter. It
-- frees before it allocates, so it works on a full server too.

-- include fence.lua
-- include queue.lua
-- include pool.lua

local ends = hold_of(ARGV[1])
if not ends then
  return 0
end
read_time()
remove_holder(ARGV[1])
remove_ended()
admit_waiters()
delete_if_unused()
return ends > now and 1 or 0
