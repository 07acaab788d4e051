-- How a broken hold is recorded, for its holder and for operators.
-- Several steps include this file. It uses no ARGV. Returns nothing itself. One step is the whole including file.
-- Include it after the file that reads the time.
--
-- KEYS 5 the history: a list of the latest breaks, the latest first
--      6 the tombstone of the broken token; absent if another library made the token
--
-- An entry is '<time us> <fence, 0: none> <fence after the break, 0: none> <holder> <operator> <reason>'. The tombstone
-- holds 'broken ' and the entry: it tells the holder why its lease is lost, refuses a late acquire step of that holder,
-- and answers a break step that is sent again.

local MOST_ENTRIES = 100
local HISTORY_MS = 2592000000 -- 30 days
local NOTICE_MS = 60000

-- The reply if the token does not hold the lock: it was broken before (the step was sent again), or nothing is changed.
local function not_held()
  local notice = KEYS[6] and redis.call('GET', KEYS[6]) or ''
  local at_us, raised = string.match(notice, '^broken (%d+) %d+ (%d+) ')
  return at_us and {1, raised, at_us} or {0, '0', '0'}
end

-- Record the break. ``lease_ms`` is the time that was left of the lease. A full server, or an ACL without lists, may
-- refuse the records: the lock is free nevertheless.
local function record(fence, raised, who_and_why, lease_ms)
  local entry = now_us .. ' ' .. fence .. ' ' .. raised .. ' ' .. who_and_why
  if KEYS[6] then
    redis.pcall('SET', KEYS[6], 'broken ' .. entry, 'PX', math.max(NOTICE_MS, lease_ms))
  end
  redis.pcall('LPUSH', KEYS[5], entry)
  redis.pcall('LTRIM', KEYS[5], 0, MOST_ENTRIES - 1)
  redis.call('PEXPIRE', KEYS[5], HISTORY_MS)
end
