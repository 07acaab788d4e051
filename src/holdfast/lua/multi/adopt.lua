-- Take a hold on several locks over from its giver: with a new token, a new fence and the new holder's ttl.
--
-- KEYS five for each name, see include/multi.lua; the tombstones are those of the new token
-- ARGV 1 the new token   2 ttl in ms   3 retention of the fence in ms
--      4 the giver's token
--
-- Returns the fence   the hold is ours in full: it was the giver's, or the step was sent twice
--         0           one of the keys is gone; nothing was changed
--         -1          one is another owner's; nothing was changed
--         -2          this adoption was abandoned before this request arrived
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because no lock may be free between the two owners, or be taken from another owner than the giver; and
-- because a hold on several locks has all of them or none.

-- include multi.lua

local found = 1
for name = 1, NAMES do
  select_name(name)
  local owner = redis.call('GET', KEYS[1])
  if owner ~= ARGV[1] and owner ~= ARGV[4] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found ~= 1 then
  return found
end
if redis.call('EXISTS', all_keys(5)) > 0 then
  return -2
end
read_time()
local last, refused = last_fence_of_all()
if refused then
  return refused
end
local fence
for name = 1, NAMES do
  select_name(name)
  if redis.call('GET', KEYS[1]) == ARGV[4] then
    redis.call('DEL', KEYS[1]) -- free memory first, so the step works on a full server too
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  fence = mint(ARGV[1], last, '1', ARGV[3])
end
return fence
