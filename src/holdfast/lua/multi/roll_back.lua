-- Undo one try to take names in several slots, which was refused in another slot: give up our places and what is kept for
-- us, and free the names that this try was granted.
--
-- KEYS five for each name, see include/multi.lua
-- ARGV 1 token   2 the fence of that grant ('': this try was granted nothing here)
--
-- Returns the fence of a grant that was not freed, because its fence is another one; 0 if there is none.
--
-- One step, because between a GET and a DEL the lease can end and another client can take the key. The token is used again
-- by the next try, so the fence is compared, too: if this step arrives late, the names of a later grant are not freed.

-- include multi.lua
-- include queue.lua
-- include grant.lua

local token, kept = ARGV[1], '0'
read_time()
for name = 1, NAMES do
  select_name(name)
  local owner = redis.call('GET', KEYS[1])
  local was_first = redis.call('ZRANGE', KEYS[3], 0, 0)[1] == token
  local opened = was_first and not owner
  if owner == token then
    local fence = string.match(redis.call('GET', KEYS[2]) or '', '^%d+') or '0'
    if redis.call('ZSCORE', KEYS[3], token) or fence == ARGV[2] then -- only kept for us, or the grant of this try
      opened = redis.call('DEL', KEYS[1]) == 1
    else
      kept = fence
    end
  end
  remove_waiter(token)
  if opened then
    grant_next()
  elseif was_first then
    local next_token, entry = first_waiter()
    if next_token then
      notify_first(next_token, entry, 0)
    end
  end
end
return kept
