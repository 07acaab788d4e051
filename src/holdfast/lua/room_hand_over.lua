-- Make a hold on a permit pool ready to be adopted: it lasts one whole ttl from now, and no late request can bring it back
-- after that.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of this token
-- ARGV 1 token   2 ttl in ms
--      3 how long the tombstone stands, in ms (0: none is needed, every request was answered)
--
-- Returns 1 it is there, 0 it is no holder, or its lease had ended.
--
-- One step, because only the holder may make its lease longer, and it can end between a look and a write.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local found = purge()
local ends, slot = hold_of(ARGV[1])
if ends then
  redis.call('ZREM', KEYS[1], '') -- nothing; but a step that has begun to write may go on, even on a full server
  if ARGV[3] ~= '0' then
    redis.call('SET', KEYS[5], '', 'PX', ARGV[3])
  end
  prolong(ARGV[1], ends, slot, tonumber(ARGV[2]))
end
if found then
  let_in()
  close_if_empty()
end
return ends and 1 or 0
