-- The server's time, and those who wait for a value: what the steps of the cache share. It has no ARGV and Returns nothing
-- of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS, in every step: 1 the entry: value, until when it is fresh (us), what it cost to compute (us)
--                      2 the claim: the token of whoever computes it
--                      3 the waiters: the channel of a process -> what its notification begins with (the key of the claim)
--                      4 the failure: when the last computation failed, until when that is remembered (us), and why

local now_us, now

local function read_time()
  local time = redis.call('TIME')
  now_us = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(now_us)
end

local MAX_TOLD = 1000 -- processes that one step tells

-- There is something to look at: each process that waits is told once. If there are too many for one step, none is: each
-- asks again by itself, within half a second.
local function ring_all()
  local count = redis.pcall('HLEN', KEYS[3]) -- an error if an ACL of an earlier version does not allow it
  local too_many = type(count) == 'number' and count > MAX_TOLD
  local waiters = too_many and {} or redis.call('HGETALL', KEYS[3])
  redis.call('DEL', KEYS[3])
  for place = 1, #waiters, 2 do
    redis.pcall('PUBLISH', waiters[place], waiters[place + 1] .. ' ask ' .. now_us .. ' 0')
  end
end
