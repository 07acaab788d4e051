-- How many permits of the pool are held?
--
-- KEYS 1 the holders (2 to 4 as in every step of a pool)
-- (no ARGV)
--
-- Returns {holders, alone}: the number of holders, and 1 if the only holder is a writer, else 0.
--
-- One step, because both numbers must describe the same moment. It writes nothing; ended leases are not counted.

-- include fence.lua

read_time()
local after_now = '(' .. now_us
local holders = redis.call('ZCOUNT', KEYS[1], after_now, '+inf')
local rank = math.floor(redis.call('ZCARD', KEYS[1]) / 3) -- of the lowest slot, as in include/pool.lua
local slot = redis.call('ZRANGE', KEYS[1], rank, rank, 'WITHSCORES')[2]
return {holders, holders == 1 and tonumber(slot) == -2 and 1 or 0} -- WRITER in include/pool.lua
