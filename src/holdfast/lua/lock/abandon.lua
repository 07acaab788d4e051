-- Give up: free the lock if it is ours, leave its queue, and refuse requests that are still on their way.
--
-- KEYS 1 the lock   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 how long the tombstone lasts, in ms (0: none, because every request was answered)
--
-- Returns {freed, buried}: freed is 1 freed, 0 the key is gone, -1 it is another owner's;
--         buried is 1, or 0 if the server had no memory for the tombstone (send the step again later).
--
-- One step, because an acquire that arrives in between would leave an orphaned key; and because a lock that was granted to
-- this waiter must go to the next one. It frees before it allocates, so it works on a full server too.

-- include fence.lua
-- include queue.lua
-- include grant.lua

local freed = 0
local owner = redis.call('GET', KEYS[1])
if owner == ARGV[1] then
  freed = redis.call('DEL', KEYS[1])
elseif owner then
  freed = -1
end
local was_first = false
read_time()
if redis.call('EXISTS', KEYS[3]) == 1 then
  was_first = redis.call('ZRANGE', KEYS[3], 0, 0)[1] == ARGV[1]
  remove_waiter(ARGV[1])
end

local buried = 1
if ARGV[2] ~= '0' then
  local tombstone = redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
  buried = tombstone.err and 0 or 1
end
if freed == 1 then
  grant_next()
elseif was_first then
  local token, entry = first_waiter()
  if token then
    notify_first(token, entry, 0)
  end
end
return {freed, buried}
