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

-- Every fence is below 2^53, so that a double is exact. 64 of them at most are set aside for one holder (lease.py, FENCES).
local MAX_LAST = 9007199254740992 - 1 - 64
local MAX_RETENTION_MS = 34560000000 -- 400 days

-- The last fence given out for this name, nil if there is none; and, if there can be no next one, an error reply. Text, inf,
-- 1e18 or a negative number was never given out, so the next fence takes its place. A number that is too large may have
-- been given out, and a lower one after it would break the order. A key of another type is not ours to overwrite.
local function last_fence()
  local last = redis.pcall('GET', KEYS[2])
  if not last then
    return nil
  elseif type(last) == 'table' then
    return nil, string.find(last.err, 'WRONGTYPE', 1, true) and {err = 'FENCETYPE ' .. KEYS[2]} or last
  elseif last == '' or string.find(last, '%D') then
    return nil
  elseif tonumber(last) > MAX_LAST then
    return nil, {err = 'FENCELIMIT ' .. KEYS[2]}
  end
  return last
end

-- The next fence, at least the time in microseconds, remembered with those set aside after it. The clock keeps fences
-- rising where a restart or failover has lost the counter; the counter where the clock stands still or steps back.
-- ``last`` comes from last_fence, before the first write of the step.
local function mint(last, fences, retention_ms)
  local fence = now_us
  if last and tonumber(last) >= now then
    fence = string.format('%.0f', last + 1)
    retention_ms = math.min(retention_ms + math.ceil((fence - now) / 1000), MAX_RETENTION_MS)
    retention_ms = string.format('%.0f', retention_ms)
  end
  local upto = fences == '1' and fence or string.format('%.0f', fence + fences - 1)
  redis.call('SET', KEYS[2], upto, 'PX', retention_ms)
  return fence
end
