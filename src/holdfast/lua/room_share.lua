-- Let others in beside us, who had the room to itself: from writing to reading, without a moment in between.
--
-- KEYS 1 those inside   2 the last fence   3 the queue   4 its waiters   5 the places
-- ARGV 1 token
--
-- Returns 1 it is inside and no longer alone, 0 it is not inside, or its lease had ended.
--
-- One step, because between leaving and coming back another writer would get in. Done twice it is as if done once.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
purge()
if not redis.call('ZSCORE', KEYS[1], ARGV[1]) then
  return 0
end
redis.call('ZREM', KEYS[5], '') -- nothing; but a step that has begun to write may go on, even on a full server
redis.call('ZADD', KEYS[5], 0, ARGV[1])
let_in()
return 1
