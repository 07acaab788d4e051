-- Change from writer to reader without a gap, and admit waiting readers.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 it is a reader now, 0 it holds nothing, or its lease had ended.
--
-- One step, because another writer could get in between a release and an acquire. The step can be repeated.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
remove_ended()
if not hold_of(ARGV[1]) then
  return 0
end
redis.call('ZREM', KEYS[1], '') -- no effect, but a full server does not stop a step after its first write
redis.call('ZADD', KEYS[1], READER, slot_entry(ARGV[1]))
admit_waiters()
return 1
