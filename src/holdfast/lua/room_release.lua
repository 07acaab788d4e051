-- Leave a permit pool, and admit the next waiters that fit.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 it has left, 0 it was no holder, or its lease had ended.
--
-- One step, because a permit that is free for a moment goes to the client that happens to ask, not to the first waiter.
-- It frees before it allocates, so that it works on a full server too.

-- include fence.lua
-- include queue.lua
-- include room.lua

local ends = hold_of(ARGV[1])
if not ends then
  return 0
end
read_time()
leave(ARGV[1])
purge()
let_in()
close_if_empty()
return ends > now and 1 or 0
