-- Let our lease last at least one ttl from now. Never shorten it. Ended leases of others are removed.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token   2 ttl in ms   3 if given: write even if the lease lasts longer, for a WAIT after it
--
-- Returns 1 renewed, 0 it holds nothing, or its lease had ended.
--
-- One step, because only the holder may extend its lease, and the lease can end between a read and a write.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
local found = remove_ended()
local ends, slot = hold_of(ARGV[1])
if ends then
  prolong(ARGV[1], ends, slot, tonumber(ARGV[2]))
  if ARGV[3] then
    redis.call('PEXPIRE', KEYS[1], redis.call('PTTL', KEYS[1]))
  end
end
if found then
  admit_waiters()
  delete_if_unused()
end
return ends and 1 or 0
