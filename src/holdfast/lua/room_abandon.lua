-- Give up: the hold if there is one, the place in the queue, and whatever may still be on its way.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 how long the tombstone stands, in ms (0: none is needed, every request was answered)
--
-- Returns {freed, buried}: freed is 1 it has left, 0 it was no holder;
--         buried is 1, or 0 if there was no memory for the tombstone (send it again later).
--
-- One step, because an acquire that arrives in the middle would leave a hold that no client relies on; and because those
-- behind it in the queue may come in now, were it the one that did not fit. It frees before it allocates, so that it
-- works on a full server too.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local ends = hold_of(ARGV[1])
leave(ARGV[1])
strike_off(ARGV[1])
local buried = 1
if ARGV[2] ~= '0' then
  local stone = redis.pcall('SET', KEYS[5], '', 'PX', ARGV[2])
  buried = stone.err and 0 or 1
end
-- Only where it is a pool still: by now the name may be a mutex, whose queue is none of our business. If the waiters were
-- deleted by hand, the mark in the queue says so.
local kind = redis.call('HGET', KEYS[4], '')
if kind and string.find(kind, 'pool$') or not kind and redis.call('ZSCORE', KEYS[3], '') then
  purge()
  let_in()
  close_if_empty()
end
return {ends and ends > now and 1 or 0, buried}
