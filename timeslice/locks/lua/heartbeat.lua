--[[
An agent joins the group, says that it lives, and vouches for a holder whose process it watches.
ARGV  1 floor  2 node  3 ttl_ms  4 lease id it vouches for, or ''  5 fence: the highest grant or swap it ever saw
Reply ok counter lease_id job host pid start token swap_id known (0: this node
      joined and has not reported since) | lock
Events NodeJoined, LeaseReclaimed, and what advance and reap emit
--]]
-- @include group waiters residency lease advance
local node, ttl_ms, vouched = ARGV[2], tonumber(ARGV[3]), ARGV[4]

begin(true)
local fence = check_number('fence', tonumber(ARGV[5]))
if S.mode == 'lock' then
  return { 'lock' }
end
floor = math.max(floor, fence)
settle_clock()
if S.mode == '' then
  set('mode', 'served')
end
local joined = not redis.call('ZSCORE', nodes_key, node)
redis.call('ZADD', nodes_key, now + ttl_ms, node)
if joined then
  notice_another_server()
  set('counter', math.max(S.counter, 1)) -- no agent's floor is nothing: it can prove a loss before the first grant
  if not is_unheard(node) then
    set('unheard', S.unheard .. ' ' .. node .. ' ')
  end
  emit('NodeJoined', 'node', node)
  wake('members')
end
raise_fence(fence)
if vouched ~= '' and S.lease_id == vouched and S.confirmed == '1' and S.host == node
  and now < S.renewed_at_ms + 10 * S.lease_ms then
  set('deadline_ms', math.max(S.deadline_ms, now + S.lease_ms))
end
reap()
advance()
save()
return { 'ok', S.counter, S.lease_id, S.job, S.host, S.pid, S.start, S.token, S.swap_id, is_unheard(node) and 0 or 1 }
