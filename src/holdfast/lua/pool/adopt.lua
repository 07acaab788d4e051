-- Take a hold on a permit pool over from its giver: the same slot, with a new token, a new fence and the new holder's ttl.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters
--      5 the tombstone of the new token
-- ARGV 1 the new token   2 ttl in ms   3 retention of the fence in ms
--      4 the giver's token   5 the giver's mode: 'n5' one of five permits, 'any' a reader, 'all' a writer
--
-- Returns {1, fence, slot}    the hold is ours: it was the giver's, or the step was sent twice
--         -2                  this adoption was abandoned before this request arrived
--         -3                  neither token holds a permit
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because the slot must never be free between the two owners, and must be taken from the giver only.

-- include fence.lua
-- include queue.lua
-- include pool.lua

read_time()
local refused
last, refused = last_fence()
if refused then
  return refused
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return -2
end
local changed = remove_ended()
local ends, slot = hold_of(ARGV[1])
local fence
if not ends then
  local _, theirs = hold_of(ARGV[4])
  slot = theirs
  remove_holder(ARGV[4]) -- free memory first, so the step works on a full server too
end
if slot then
  if slot == WRITER and ARGV[5] ~= 'all' then
    slot = READER -- the giver was changing from writer to reader when the outcome became unknown
    changed = true
  end
  prolong(ARGV[1], ends or 0, slot, tonumber(ARGV[2]))
  fence = renew_fence(ARGV[1], ARGV[3])
end
if changed then
  admit_waiters()
  delete_if_unused()
end
return slot and {1, fence, client_slot(slot)} or -3
