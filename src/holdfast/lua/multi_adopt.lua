-- Take a hold on several locks over from its giver, who has let go of it: a new token, a new fence, a ttl of one's own.
--
-- KEYS five for each name, see several.lua; the tombstones are those of the new token
-- ARGV 1 the new token   2 ttl in ms   3 how long a fence is remembered after it was given out, in ms
--      4 the giver's token
--
-- Returns the fence   the hold is ours, all of it, whether it was the giver's or, sent twice, already ours
--         0           one of the keys is gone, and nothing was changed
--         -1          one is another owner's, and nothing was changed
--         -2          this adoption was given up before this request arrived
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, because none of them must be free for a moment between two owners, nor be taken from anybody but the giver;
-- and because whoever has one of them has all.

-- include several.lua

local found = 1
for name = 1, NAMES do
  look_at(name)
  local owner = redis.call('GET', KEYS[1])
  if owner ~= ARGV[1] and owner ~= ARGV[4] then
    found = math.min(found, owner and -1 or 0)
  end
end
if found ~= 1 then
  return found
end
if redis.call('EXISTS', each(5)) > 0 then
  return -2
end
read_time()
local last, refused = last_fence_of_all()
if refused then
  return refused
end
local fence
for name = 1, NAMES do
  look_at(name)
  if redis.call('GET', KEYS[1]) == ARGV[4] then
    redis.call('DEL', KEYS[1]) -- first, for then this works on a full server too
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  elseif redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
  end
  fence = mint(last, '1', ARGV[3])
end
return fence
