-- The server's time, and the fences made from it.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
--
-- KEYS 2 the last fences given out for this name: the first of them, their number, and the end of the holder's token.
--        The end of the token shows inspectors whether the fences belong to the current holder. The first fence is also
--        the time of the grant (us), unless the clock was behind the last fence.

local now_us, now

local function read_time()
  local time = redis.call('TIME')
  now_us = time[1] .. string.sub('00000' .. time[2], -6)
  now = tonumber(now_us)
end

-- Every fence is below 2^53, so that a double is exact. At most 64 are reserved for one holder (options.py, FENCES).
local MAX_LAST = 9007199254740992 - 1 - 64
local MAX_RETENTION_MS = 34560000000 -- 400 days

-- The last fence given out for this name, or nil; and an error reply if there can be no next one. Text, inf, 1e18 and
-- negative numbers were never given out, so the next fence replaces them. A number that is too large may have been
-- given out; then a lower fence would break the order. A key of another type belongs to another program. Earlier
-- versions wrote a single number: the last fence.
local function last_fence()
  local last = redis.pcall('GET', KEYS[2])
  if not last then
    return nil
  elseif type(last) == 'table' then
    return nil, string.find(last.err, 'WRONGTYPE', 1, true) and {err = 'FENCETYPE ' .. KEYS[2]} or last
  end
  local first, count = string.match(last, '^(%d+) (%d%d?) %S+$')
  last = first and first + count - 1 or not string.find(last, '%D') and tonumber(last)
  if last and last > MAX_LAST then
    return nil, {err = 'FENCELIMIT ' .. KEYS[2]}
  end
  return last or nil
end

-- Returns the next fence, for that token; records it and the reserved fences after it. The fence is at least the time
-- in microseconds. If a restart or failover loses the counter, the clock keeps fences rising. If the clock stops or is
-- set back, the counter keeps them rising. ``last`` comes from last_fence, called before the first write of the step.
local function mint(token, last, fences, retention_ms)
  local fence = now_us
  if last and last >= now then
    fence = string.format('%.0f', last + 1)
    retention_ms = math.min(retention_ms + math.ceil((fence - now) / 1000), MAX_RETENTION_MS)
    retention_ms = string.format('%.0f', retention_ms)
  end
  local block = fence .. ' ' .. fences .. ' ' .. string.sub(token, -8)
  redis.call('SET', KEYS[2], block, 'PX', retention_ms)
  return fence
end
