-- Make our lease last at least so long from now; never make it shorter. And take out those whose lease has ended.
--
-- KEYS 1 those inside   2 the last fence   3 the queue   4 its waiters   5 the places
-- ARGV 1 token   2 ttl in ms
--
-- Returns 1 renewed, 0 it is not inside, or its lease had ended.
--
-- One step, because only the holder may make its lease longer, and it can end between a look and a write.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local found = purge()
local ends = redis.call('ZSCORE', KEYS[1], ARGV[1])
if ends and tonumber(ends) < now + ARGV[2] * 1000 then
  redis.call('ZREM', KEYS[5], '') -- nothing; but a step that has begun to write may go on, even on a full server
  redis.call('ZADD', KEYS[1], string.format('%.0f', now + ARGV[2] * 1000), ARGV[1])
  keep_all(tonumber(ARGV[2]))
end
if found then
  let_in()
  close_if_empty()
end
return ends and 1 or 0
