-- Take a hold on a permit pool over from its giver, who has let go of it: the same slot, with a new token, a new fence,
-- and a ttl of one's own.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of the new token
-- ARGV 1 the new token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 the giver's token   5 how much it had: 'n5' one of five permits, 'any' a reader's part, 'all' a writer's
--
-- Returns {1, fence, slot}    the hold is ours, whether it was the giver's or, sent twice, already ours
--         -2                  this adoption was given up before this request arrived
--         -3                  neither is a holder
--
-- One step, because the slot must not be free for a moment between two owners, and must not be taken from anybody but
-- the giver. Those who wait are not looked at: nothing has become free for them.

-- include fence.lua
-- include queue.lua
-- include room.lua

read_time()
local refused
last, refused = last_fence()
if refused then
  return refused
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return -2
end
local changed = purge()
local ends, slot = hold_of(ARGV[1])
if not ends then
  local _, theirs = hold_of(ARGV[4])
  slot = theirs
  leave(ARGV[4]) -- first, for then this works on a full server too
end
if slot then
  if slot == WRITER and ARGV[5] ~= 'all' then
    slot = READER -- the giver was on its way from writing to reading, and could not know whether it had come there
    changed = true
  end
  prolong(ARGV[1], ends or 0, slot, tonumber(ARGV[2]))
end
if changed then
  let_in()
  close_if_empty()
end
return slot and {1, mint(last, '1', ARGV[3]), told(slot)} or -3
