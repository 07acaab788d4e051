-- Give up: free the permit if there is one, leave the queue, and refuse requests that are still on their way.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 how long the tombstone lasts, in ms (0: none, because every request was answered)
--
-- Returns {freed, buried}: freed is 1 freed, 0 it held nothing;
--         buried is 1, or 0 if the server had no memory for the tombstone (send the step again later).
--
-- One step, because an acquire that arrives in between would leave an orphaned hold; and because waiters behind this one
-- may fit now. It frees before it allocates, so it works on a full server too.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
local ends = hold_of(ARGV[1])
remove_holder(ARGV[1])
remove_waiter(ARGV[1])
local buried = 1
if ARGV[2] ~= '0' then
  local tombstone = redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
  buried = tombstone.err and 0 or 1
end
-- Only if the name is still a pool: by now it may be a mutex, whose queue must not be changed here. If the waiters were
-- deleted by hand, '' in the queue shows the pool.
local kind = redis.call('HGET', KEYS[4], 'kind')
if kind and kind ~= 'latch' or not kind and redis.call('ZSCORE', KEYS[3], '') then
  remove_ended()
  admit_waiters()
  delete_if_unused()
end
return {ends and ends > now and 1 or 0, buried}
