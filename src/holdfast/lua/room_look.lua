-- How full is the permit pool?
--
-- KEYS 1 the holders (2 to 4 as in every step of a pool)
-- (no ARGV)
--
-- Returns {holders, alone}: how many there are, and 1 if it is a writer.
--
-- One step, because both are to be said of the same moment. It changes nothing: a holder whose lease has ended
-- does not count.

-- include fence.lua

read_time()
local after_now = '(' .. now_us
local holders = redis.call('ZCOUNT', KEYS[1], after_now, '+inf')
local slot = redis.call('ZRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2]
return {holders, holders == 1 and tonumber(slot) == -2 and 1 or 0} -- WRITER in room.lua
