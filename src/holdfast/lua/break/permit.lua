-- An operator takes a permit back: end the hold that was inspected, raise the fence, and admit the next waiters that fit.
--
-- KEYS 1 the holders   2 the last fence   3 the queue   4 its waiters   5 the history   6 the tombstone of the token
-- ARGV 1 the token   2 its fence ('': not compared)   3 retention of the fence in ms
--      4 the holder, the operator and the reason, for the history
--
-- Returns {1, fence, us}   broken at that time; the fence is greater than that of the holder, and lower than all later ones
--         {0, 0, 0}        nothing was changed: the token holds nothing, or has another fence
--         error FENCELIMIT, FENCETYPE   see fence.lua
--
-- One step, for the reasons of break/lock.lua.

-- include fence.lua
-- include queue.lua
-- include pool.lua
-- include broken.lua

local ends = hold_of(ARGV[1])
if not ends then
  return not_held()
end
local score = redis.call('ZSCORE', KEYS[1], fence_entry(ARGV[1])) or NO_FENCE
local fence = score == NO_FENCE and '0' or string.format('%.0f', -score)
if ARGV[2] ~= '' and ARGV[2] ~= fence then
  return {0, '0', '0'}
end
local refused
last, refused = last_fence()
if refused then
  return refused
end
read_time()
remove_holder(ARGV[1])
local retention_ms = math.max(ARGV[3], redis.call('PTTL', KEYS[2]))
local raised = mint('00000000', last, '1', string.format('%.0f', retention_ms)) -- no token ends in these digits
last = tonumber(raised)
record(fence, raised, ARGV[4], math.max(0, math.ceil((ends - now) / 1000)))
remove_ended()
admit_waiters()
delete_if_unused()
return {1, raised, now_us}
