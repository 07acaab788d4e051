-- Take a place in a room over from its giver, who has let go of it: the same place, with a new token, a new fence, and a
-- ttl of one's own.
--
-- KEYS 1 those inside   2 the last fence   3 the queue   4 its waiters   5 the places
--      6 the tombstone of the new token
-- ARGV 1 the new token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 the giver's token   5 how much it had: 'n5' one of five places, 'any' one of very many, 'all' of them
--
-- Returns {1, fence, place}   the place is ours, whether it was the giver's or, sent twice, already ours
--         -2                  this adoption was given up before this request arrived
--         -3                  neither is inside
--
-- One step, because the place must not be free for a moment between two owners, and must not be taken from anybody but
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
if redis.call('EXISTS', KEYS[6]) == 1 then
  return -2
end
local changed = purge()
local ours = redis.call('ZSCORE', KEYS[1], ARGV[1])
local holder = ours and ARGV[1] or ARGV[4]
local place = tonumber(redis.call('ZSCORE', KEYS[5], holder))
local ends = now + ARGV[2] * 1000
if place then
  leave(holder) -- first, for then this works on a full server too
  if place < 0 and ARGV[5] ~= 'all' then
    place = 0 -- the giver was on its way from writing to reading, and could not know whether it had come there
    changed = true
  end
  redis.call('ZADD', KEYS[1], string.format('%.0f', math.max(ends, tonumber(ours or 0))), ARGV[1])
  redis.call('ZADD', KEYS[5], place, ARGV[1])
  keep_all(tonumber(ARGV[2]))
end
if changed then
  let_in()
  close_if_empty()
end
return place and {1, mint(last, '1', ARGV[3]), place} or -3
