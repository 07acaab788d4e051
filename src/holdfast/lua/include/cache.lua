-- The server's time, and the waiters for a value of the cache.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 1 the entry: 'value', 'fresh' (fresh until, us), 'cost' (time to compute it, us)
--      2 the claim: the token of the caller that computes the value
--      3 the waiters: channel of a process -> what its notification begins with (the key of the claim)
--      4 the failure: when the last computation failed, until when that is remembered (us), and why

local now_us, now

local function read_time()
  local time = redis.call('TIME')
  now_us = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(now_us)
end

local MAX_NOTIFIED = 1000 -- how many processes one step can notify

-- Ask each waiting process to look again. If there are too many for one step, none is notified: each looks again within
-- half a second anyway.
local function notify_all()
  local count = redis.pcall('HLEN', KEYS[3]) -- an error if the ACL was written for an earlier version
  local too_many = type(count) == 'number' and count > MAX_NOTIFIED
  local waiters = too_many and {} or redis.call('HGETALL', KEYS[3])
  redis.call('DEL', KEYS[3])
  for index = 1, #waiters, 2 do
    redis.pcall('PUBLISH', waiters[index], waiters[index + 1] .. ' ask ' .. now_us .. ' 0')
  end
end
