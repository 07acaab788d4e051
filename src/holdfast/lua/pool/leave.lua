-- Let a hold on a permit pool end by itself after that time: its holder leaves, and does not renew it.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token   2 how long it is held from now, in ms
--
-- Returns 1 it ends then, 0 it holds nothing, or its lease had ended.
--
-- One step, for the reasons of multi/leave.lua.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
local ends, slot = hold_of(ARGV[1])
if not ends or ends <= now then
  return 0
end
redis.call('ZREM', KEYS[1], '') -- no effect, but a full server does not stop a step after its first write
write_hold(ARGV[1], slot, tonumber(ARGV[2]))
return 1
