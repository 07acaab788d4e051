-- Prepare a hold on a permit pool for adoption: it lasts one full ttl from now, and no late request can bring it back after
-- that.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl in ms
--      3 how long the tombstone lasts, in ms (0: none, because every request was answered)
--
-- Returns 1 prepared, 0 it holds nothing, or its lease had ended.
--
-- One step, because only the holder may extend its lease, and the lease can end between a read and a write.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
local found = remove_ended()
local ends, slot = hold_of(ARGV[1])
if ends then
  redis.call('ZREM', KEYS[1], '') -- no effect, but a full server does not stop a step after its first write
  if ARGV[3] ~= '0' then
    redis.call('SET', KEYS[5], '', 'PX', ARGV[3])
  end
  prolong(ARGV[1], ends, slot, tonumber(ARGV[2]))
end
if found then
  admit_waiters()
  delete_if_unused()
end
return ends and 1 or 0
