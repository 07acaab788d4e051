-- How full is the room?
--
-- KEYS 1 those inside   5 the places (2 to 4 as in every step of a room)
-- (no ARGV)
--
-- Returns {inside, alone}: how many are inside, and 1 if it is one who has the room to itself.
--
-- One step, because both are to be said of the same moment. It changes nothing: who is inside beyond its end does not count.

-- include fence.lua

read_time()
local after_now = '(' .. now_us
local inside = redis.call('ZCOUNT', KEYS[1], after_now, '+inf')
local place = redis.call('ZRANGE', KEYS[5], 0, 0, 'WITHSCORES')[2]
return {inside, inside == 1 and tonumber(place) == -1 and 1 or 0}
