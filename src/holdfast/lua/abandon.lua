-- Give the lock back if it is ours, and see to it that no earlier request for it can still succeed.
--
-- KEYS 1 the lock   2 the tombstone of this token
-- ARGV 1 token   2 how long the tombstone stands, in ms
--
-- Returns {freed, buried}: freed is 1 freed, 0 the key is gone, -1 it is another owner's;
--         buried is 1, or 0 if there was no memory for the tombstone (send it again later).
--
-- One step, because an acquire that arrives between the two halves would leave a key that nobody believes in. It
-- frees before it allocates, so that it works on a full server too.

local freed = 0
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then
  freed = redis.call('DEL', KEYS[1])
elseif owner then
  freed = -1
end
local stone = redis.pcall('SET', KEYS[2], '', 'PX', ARGV[2])
return {freed, stone.err and 0 or 1}
