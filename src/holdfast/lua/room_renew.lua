-- Make our lease last at least so long from now; never make it shorter. And take out those whose lease has ended.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token   2 ttl in ms
--
-- Returns 1 renewed, 0 it is no holder, or its lease had ended.
--
-- One step, because only the holder may make its lease longer, and it can end between a look and a write.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local found = purge()
local ends, slot = hold_of(ARGV[1])
if ends then
  prolong(ARGV[1], ends, slot, tonumber(ARGV[2]))
end
if found then
  let_in()
  close_if_empty()
end
return ends and 1 or 0
