-- The server's time and the fences that are made of it: what the steps that include this file share. It has no ARGV and
-- Returns nothing of its own. One step is always one whole file: the other, with this one in it.
--
-- KEYS 2 the last fence given out for this name

local now_us, now

local function read_time()
  local time = redis.call('TIME')
  now_us = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(now_us)
end

-- The next fence, at least the time in microseconds, remembered with those set aside after it. The clock keeps fences
-- rising where a restart or failover has lost the counter; the counter where the clock stands still or steps back. A
-- double is exact up to the year 2255.
local function mint(last, fences, retention_ms)
  local fence = now_us
  if last and tonumber(last) >= now then
    fence = string.format('%.0f', last + 1)
    retention_ms = string.format('%.0f', retention_ms + math.ceil((fence - now) / 1000))
  end
  local upto = fences == '1' and fence or string.format('%.0f', fence + fences - 1)
  redis.call('SET', KEYS[2], upto, 'PX', retention_ms)
  return fence
end
