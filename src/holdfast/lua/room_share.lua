-- From writing to reading, without a moment in between: let readers in beside us.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
-- ARGV 1 token
--
-- Returns 1 it reads, 0 it is no holder, or its lease had ended.
--
-- One step, because between leaving and coming back another writer would get in. Done twice it is as if done once.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
purge()
if not hold_of(ARGV[1]) then
  return 0
end
redis.call('ZREM', KEYS[1], '') -- nothing; but a step that has begun to write may go on, even on a full server
redis.call('ZADD', KEYS[1], READER, slot_entry(ARGV[1]))
let_in()
return 1
